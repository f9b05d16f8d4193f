"""Commands to copy, one list a command: the end of its help (``Commands.get_command``)."""

EXAMPLES = {
    "align": (
        "precaudit align examples/own_decoder.py:program examples/own_decoder -o own.toml",
        "precaudit align converted original",
    ),
    "audit": ("precaudit audit", "precaudit audit --config precaudit.toml --junit audit.xml"),
    "baseline": (
        "precaudit baseline runs/a -o traces/baselines/tiny.jsonl",
        "precaudit baseline rollouts.jsonl -o traces/baselines/rollouts.jsonl",
        "precaudit baseline runs/b -o traces/baselines/tiny.jsonl --accept --why 'JAX 0.11'",
    ),
    "bisect": (
        "precaudit bisect tiny --good fp32-highest --bad bf16 --by policy --test 'kl<1e-5'",
        "precaudit bisect tiny --by layers --raise float32 --test 'kl<1e-4'",
    ),
    "compare": (
        "precaudit compare runs/a",
        "precaudit compare runs/a --layers 1 --points q,attn_out -v",
        "precaudit compare runs/a runs/b",
    ),
    "diagnose": ("precaudit diagnose runs/a", "precaudit diagnose runs/a --layers 1 -v"),
    "doctor": ("precaudit doctor", "precaudit doctor --json", "precaudit doctor --clear references"),
    "explain": ("precaudit explain excess", "precaudit explain not run", "precaudit explain exit-codes"),
    "export": ("precaudit export runs/a --csv errors.csv", "precaudit export runs/a --tensorboard logs"),
    "gate": (
        "precaudit gate runs/a",
        "precaudit gate runs/a --budgets budgets.toml --junit gate.xml",
        "precaudit gate rollouts.jsonl --baseline traces/baselines/rollouts.jsonl",
    ),
    "gradcheck": (
        "precaudit gradcheck examples/bf16_reference.py:kernel",
        "precaudit gradcheck kernels.py:mine --reference kernels.py:plain --inputs kernels.py:inputs -o errors.jsonl",
        "precaudit gradcheck --list",
    ),
    "import": (
        "precaudit import dump -o runs/theirs",
        "precaudit import dump.safetensors --map names.toml -o runs/theirs",
    ),
    "init": ("precaudit init examples/own_decoder.py:program",),
    "lint": (
        "precaudit lint examples/own_decoder.py:program",
        "precaudit lint tiny --tpu v5e:2x2 --policy fp32",
        "precaudit lint --list",
    ),
    "models": ("precaudit models", "precaudit models tiny", "precaudit models --check tiny"),
    "open": ("precaudit open runs/a", "precaudit open runs/a --layers 0:8 --phases decode"),
    "points": ("precaudit points examples/own_decoder.py:program",),
    "probe": (
        "precaudit probe",
        "precaudit probe --shape 1,1,1,128x512 --tpu v5e --fail-on 'default on v5e worse than 1e-3'",
    ),
    "report": ("precaudit report runs/a", "precaudit report runs/a --all", "precaudit report runs/a --html a.html"),
    "same": (
        "precaudit same examples/two_ways.py:full examples/two_ways.py:cached",
        "precaudit same examples/served_decoder.py:program@prefill examples/served_decoder.py:program@rescore",
    ),
    "sweep": (
        "precaudit sweep tiny --policy bf16,bf16-fp32-scores,fp32 -o runs/sweep",
        "precaudit sweep tiny --tpu v5e --plot sweep.html -o runs/sweep",
    ),
    "rollout": (
        "precaudit rollout tiny --from rollouts.jsonl --fail-above kl=1e-3 -o records.jsonl",
        "precaudit rollout tiny --n 4 --loops python,while --policy bf16,fp32 --html rollout.html",
        "precaudit rollout smollm2 --answers questions.jsonl --policy bf16,fp32",
    ),
    "trace": (
        "precaudit trace tiny -o runs/a",
        "precaudit trace tiny --text 'def main(' --points all --set scores=float32",
        "precaudit trace examples/own_decoder.py:program -o runs/own",
    ),
    "watch": (
        "precaudit watch -- python examples/serve.py",
        "precaudit watch --gate --function next_token -o runs/w -- python examples/serve.py",
    ),
    "warmup": (
        "precaudit warmup tiny --lengths 40,500 --new-tokens 64 --policy bf16,fp32",
        "precaudit warmup smollm2 --for trace --decode-steps 8 --batch 1",
    ),
}


def epilog(name: str) -> str | None:
    r"""Return the examples of a command as the end of its help, unwrapped (``\b``); None where there are none."""
    lines = EXAMPLES.get(name)
    return "\b\n" + "\n".join(("Examples:", *(f"  {line}" for line in lines))) if lines else None
