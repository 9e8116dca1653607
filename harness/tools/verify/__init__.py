"""Compare what a running SGLang server holds with what a checkpoint, or somebody's sender, says it must hold."""
