"""One network, tiled over unequal ranks: `tile`, `TiledModel`, and whole weights."""
