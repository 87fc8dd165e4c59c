"""Compare llama.cpp with the run that was exported: logits within 1e-4, and the same greedy tokens.

    pip install gguf sentencepiece llama-cpp-python
    deeploop export RUN FOLDER --format nanbeige
    python benchmarks/llama_cpp_agreement.py RUN FOLDER --llama-cpp CHECKOUT

Writes FOLDER/model.gguf in fp32 by the converter of a llama.cpp checkout that knows Nanbeige, then reads the
first validation window of the run's corpus with both engines, and continues its first 16 tokens by 64. The
cache is in fp32; llama.cpp's own default is fp16. Exits with 1 unless they agree.

The converter knows tokenizers by a hash of what they give for a text, so it refuses one that was trained on
your own corpus. All of ours split text as GPT-2 does, which is what it is told here.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from llama_cpp import GGML_TYPE_F32, Llama

import deeploop
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.eval.generation import generate
from deeploop.runs.folder import load_config

TOLERANCE = 1e-4
TOKENS = 64


def convert(llama_cpp: Path, folder: Path, own_tokenizer: bool) -> Path:
    """Write the exported folder as a GGUF file into it."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    if own_tokenizer:
        TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    file = folder / "model.gguf"
    sys.argv[1:] = [str(folder), "--outtype", "f32", "--outfile", str(file)]
    convert_hf_to_gguf.main()
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="a checkout, for its converter")
    parser.add_argument("--data", type=Path, help="corpus, where it is not where the run was trained on it")
    options = parser.parse_args()

    ours, tokenizer = deeploop.load(options.run)
    file = convert(options.llama_cpp, options.folder, own_tokenizer=tokenizer.name.startswith("bpe:"))
    context = ours.config.context
    types = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    theirs = Llama(str(file), n_ctx=context, logits_all=True, verbose=False, **types)
    corpus = Corpus.open(options.data or load_config(options.run).data.folders[0])
    window = validation_windows(corpus.validation, context, 1)[0]
    with torch.no_grad():
        expected = ours.logits(ours(window).states)[0].numpy()
    theirs.eval(window[0].tolist())
    worst = float(np.abs(theirs.scores[:context] - expected).max())

    prompt = window[0, :16].tolist()
    own = list(generate(ours, prompt, max_tokens=TOKENS))
    found = list(islice(theirs.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0), len(own)))
    text = tokenizer.decode([token for token in prompt if token != tokenizer.end_of_text])
    same_ids = theirs.tokenize(text.encode(), add_bos=False) == tokenizer.encode(text)
    theirs.close()
    print(f"{file}: K = {ours.config.blocks}, R = {ours.rounds}")
    print(f"logits: at most {worst:.1e} apart (largest {np.abs(expected).max():.1f})")
    equal = sum(map(int.__eq__, own, found))
    print(f"greedy tokens: {equal} of {len(own)} equal, {len(set(own))} distinct; same ids: {same_ids}")
    sys.exit(not (worst <= TOLERANCE and own == found and same_ids))


if __name__ == "__main__":
    main()
