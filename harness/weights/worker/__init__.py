"""What runs inside SGLang's schedulers: custom weight loaders, the one door into them that needs no HTTP."""
