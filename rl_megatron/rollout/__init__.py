"""How text is sampled: one file per engine, one protocol, one set of sampling rules."""
