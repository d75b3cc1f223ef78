"""What needs a teacher: losses, fitting, and how far a converted model is from its original."""
