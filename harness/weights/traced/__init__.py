"""What one rank's own loader does with what is sent, traced: the one model of what a rank must hold."""
