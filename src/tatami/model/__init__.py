"""One network, tiled over ranks that are not alike: `tile`, `TiledModel`, and whole weights."""
