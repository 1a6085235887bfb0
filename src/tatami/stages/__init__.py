"""Pipeline stages: contiguous pieces of any network, each run by another rank."""
