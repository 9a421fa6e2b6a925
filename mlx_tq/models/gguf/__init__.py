"""GGUF files, llama.cpp's format: their header, weights, hyperparameters and tokenizer, as mlx-lm wants them."""
