"""Its place puts `attention_cases` on the path of the tests in the folders below."""
