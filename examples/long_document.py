"""Ask a question about a document that is longer than the cache.

pip install -e '.[rescue]'
python examples/long_document.py FILE "QUESTION" [MODEL]
"""

import sys
from pathlib import Path

import mlx_tq
from mlx_tq.policies import TriAttention

if len(sys.argv) not in (3, 4):
    sys.stderr.write('usage: python examples/long_document.py FILE "QUESTION" [MODEL]\n')
    sys.exit(2)
document, question, *rest = sys.argv[1:]

try:
    text = Path(document).read_text(encoding="utf-8")
    model, tokenizer = mlx_tq.load(rest[0] if rest else None)
    # Half of the tokens stay; the others are evicted in blocks of 64, which can be recalled. 256 tokens calibrate.
    config = mlx_tq.KVConfig(sinks=32, evict=mlx_tq.EvictConfig(TriAttention(granularity=64, warmup=256), "50%"))

    with mlx_tq.Session(model, tokenizer, config, rescue="auto") as session:
        # The document is a turn of its own, so that evicted tokens can be recalled for the question.
        "".join(session.respond(text, max_tokens=8))
        print("".join(session.respond(question)))
        turn = session.turns[-1]
        print(f"{len(turn.recalled)} tokens recalled, {len(turn.quotation.ids)} quoted")
except (OSError, UnicodeDecodeError, mlx_tq.MlxTqError) as error:
    sys.stderr.write(f"{document}: {error}\n")
    sys.exit(2)
