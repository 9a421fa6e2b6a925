"""Names of formats, profiles, policies and the like, for help texts: the registries that own them load mlx.

A test compares each with its registry. What other packages add to a registry is missing here and works all the same.
"""

FORMATS = (
    "fp16",
    "fp8",
    "q8",
    "q8_0",
    "spectral16_int16",
    "spectral14_int16",
    "tbq4_0",
    "tcq4",
    "tq4",
    "spectral12_int16",
    "tq35",
    "spectral10_int16",
    "spectral16_int8",
    "tbq3_0",
    "tcq3",
    "tq3",
    "tq3_0",
    "spectral14_int8",
    "spectral8_int16",
    "spectral12_int8",
    "tq25",
    "spectral16",
    "spectral10_int8",
    "tcq2",
    "tq2",
    "spectral14",
    "spectral12",
    "spectral8_int8",
    "spectral10",
    "spectral8",
)
PROFILES = ("off", "safe", "balanced", "small", "tiny", "long")
DEFAULT_PROFILE = "balanced"
POLICIES = ("triattention", "expected_attention", "knorm", "random", "recency", "streaming")
BACKENDS = ("auto", "metal", "cuda", "reference")
DTYPES = ("float32", "float16", "bfloat16")
NEEDLE_KINDS = ("single", "multi", "paraphrased", "decoys")
