"""What SGLang's CPU mode lacks on package registries: stand-ins, named as such, and the engine's CPU environment."""
