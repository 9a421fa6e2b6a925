"""Facts hidden in long texts, and questions that ask for them."""
