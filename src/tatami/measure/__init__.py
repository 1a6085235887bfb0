"""How fast a rank's processor computes a network, and how that depends on the size of its tile."""
