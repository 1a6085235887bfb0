"""How a network is divided: blocks whose units ranks share, found and tested on a sample; pieces at which stages are cut."""
