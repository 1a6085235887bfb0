"""Modules that run, as they are, with a part of their units: what was registered, mixtures of experts, vocabularies."""
