"""Names of formats, profiles, policies and the like, for help texts: the registries that own them load mlx.

A test compares each with its registry. What other packages add to a registry is missing here and works all the same.
"""

FORMATS = ("fp16", "q8", "tcq4", "tq4", "tcq3", "tq3", "tcq2", "tq2")
PROFILES = ("off", "safe", "balanced", "small", "tiny", "long")
DEFAULT_PROFILE = "balanced"
POLICIES = ("triattention", "expected_attention", "knorm", "random", "recency", "streaming")
BACKENDS = ("auto", "metal", "cuda", "reference")
DTYPES = ("float32", "float16", "bfloat16")
