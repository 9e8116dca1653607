"""A model at its true size without its hardware: SGLang's and transformers' own classes, without memory for values."""
