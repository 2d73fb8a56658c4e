def trials(*a): return iter(())
