"""The rehearsal: thousands of simulated machines that run the decisions of the library itself."""
