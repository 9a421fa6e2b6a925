"""All layers of one sequence: how they are planned and built, what they have lost, and what they take."""
