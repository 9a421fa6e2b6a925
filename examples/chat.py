"""Chat from Python with eviction: evicted tokens are recalled when a turn needs them.

pip install -e '.[rescue]'
python examples/chat.py [MODEL]
"""

import sys

import mlx_tq
from mlx_tq.policies import TriAttention

try:
    model, tokenizer = mlx_tq.load(sys.argv[1] if len(sys.argv) > 1 else None)
except mlx_tq.MlxTqError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(2)
# Half of the tokens stay; the others are evicted in blocks of 64, which can be recalled. The first 32 and the last 64
# are never evicted.
config = mlx_tq.KVConfig(sinks=32, window=64, evict=mlx_tq.EvictConfig(TriAttention(granularity=64), "50%"))

with mlx_tq.Session(model, tokenizer, config, rescue="auto") as session:
    for words in ("The access code is 417295. " + "The sky is blue. " * 100, "What is the access code?"):
        print(f"> {words[:40]}")
        for piece in session.respond(words):
            print(piece, end="", flush=True)
        print()
    stats = session.stats
    print(f"{stats.live} tokens in the cache, {stats.evicted} evicted, {stats.nbytes / 1e6:.1f} MB")
