"""SGLang's class of one rank on the meta device: which elements of a checkpoint go where, without a GPU."""
