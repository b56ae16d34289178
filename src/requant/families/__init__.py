"""What modules are for: facts about model families, and the roles that names give away."""
