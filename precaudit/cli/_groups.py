"""The commands as ``precaudit --help`` and the documentation list them: what they are for, most common first."""

GROUPS = {
    "Start here": ("trace", "compare", "gate", "diagnose", "report", "open", "explain"),
    "Your own code": ("watch", "points", "align", "same", "lint"),
    "Other runs and policies": ("models", "import", "export", "sweep", "bisect"),
    "Continuous integration": ("init", "audit", "baseline"),
    "Kernels and devices": ("gradcheck", "probe", "doctor"),
    "Reinforcement learning": ("rollout", "warmup"),
}
