"""The processes, on one machine or several, that run one model together, and how they stay of one mind."""
