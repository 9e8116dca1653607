"""The engine's side: one SGLang engine for each (tp, pp) group."""
