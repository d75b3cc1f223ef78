"""One vocabulary for all commands: in which part of the help an option stands, by its name alone."""

from __future__ import annotations

INPUT = "Input"
ATTENTION = "Attention"
SIZE = "Size"
TRAINING = "Training"
DISTILLATION = "Distillation"
MEASURING = "Measuring"
WRITING = "Writing text"
RUNNING = "Running"
OUTPUT = "Output"

_PARTS: dict[str, str] = {
    INPUT: "allow_pickle baselines column data date encoder held_out images list_ model original pattern peers prompt "
    "quick random recipe relevances samples sequence sequences skip_bad split task tasks text texts tokenizer add",
    ATTENTION: "attention bias features gamma heads_exact keep keep_heads layers max_distance norms recall_heads "
    "scale sinks window draw draws first_draw",
    SIZE: "batch depths deep_lengths dims head_dim heads image_size length lengths median patch size sizes "
    "crowded_length chunk width time_length step_features step_heads use_length shard_tokens validation_share "
    "test_share ranks softmax",
    TRAINING: "context_parallel learning_rate resume seeds set sets steps timeout tuning tuning_learning_rate",
    DISTILLATION: "distill lora lora_layers minutes repeats seconds tune window_dropout",
    MEASURING: "backward budget check compiled contexts errors generate gradients heap heaps judge_minutes max_seconds "
    "memory modes no_judge passes passkey_lengths passkeys probe resamples rounds sample_tokens tolerance",
    WRITING: "beams length_penalty temperature tokens top_k",
    RUNNING: "device follow_links hours limits seed threads",
    OUTPUT: "as_json force growing logits pictures prompt_only help out page records save tables version",
}
PANELS: dict[str, str] = {name: part for part, names in _PARTS.items() for name in names.split()}
