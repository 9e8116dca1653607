"""What runs inside SGLang's scheduler processes, called through the custom-weight-loader hook (rollout/schedulers.py)."""
