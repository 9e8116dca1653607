"""What runs inside SGLang's scheduler processes, asked for by VerlEngine.ask."""
