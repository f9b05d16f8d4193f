"""Fields of config.json that no forward computation reads.

DERIVED is what transformers' base configuration takes and no modelling code of the ten families mentions
(tests/models/test_configurations.py derives it again from the installed transformers); the rest by hand.
"""

DERIVED = frozenset(
    [
        "_commit_hash",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "experts_implementation",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_hidden_states",
        "output_scores",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers_version",
        "typical_p",
    ]
)

# Read, but not by the sum: which implementation runs, in which format, what comes back beside the logits, whether a
# cache is kept, dropout and initialisation of training, tokens that mean something to generation.
BESIDE = frozenset(
    [
        "_attn_implementation",
        "_experts_implementation",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "initializer_range",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_router_logits",
        "pad_token_id",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "tie_last_hidden_states",
        "use_cache",
    ]
)

# Of older versions of transformers, of fine-tuning tools, of converters.
LEFT_BEHIND = frozenset(
    [
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "_sliding_window_pattern",
        "add_cross_attention",
        "cache_implementation",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "embedding_dropout",
        "finetuning_task",
        "gradient_checkpointing",
        "head_dropout",
        "hidden_dropout",
        "ignore_index",
        "is_decoder",
        "is_llama_config",
        "language",
        "loss_type",
        "mask_token_id",
        "max_new_tokens",
        "max_sequence_length",
        "model_max_length",
        "neftune_noise_alpha",
        "prefix",
        "pretraining_tp",
        "pruned_heads",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torchscript",
        "transformers.js_config",
        "transformers_weights",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
    ]
)

UNREAD = DERIVED | BESIDE | LEFT_BEHIND
