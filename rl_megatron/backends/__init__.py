"""How a model is held, scored and stepped: one folder per engine, one protocol for all."""
