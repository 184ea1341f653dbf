"""List other trainers' names for our keys, for users who come from there."""

SYNONYMS: dict[str, str] = {
    "run.name": "run_name exp_name experiment experiment_name wandb_run_name",
    "run.root": "output_dir out_dir save_dir log_dir checkpoint_dir",
    "run.seed": "random_seed manual_seed data_seed",
    "model.family": "model_type architecture arch",
    "model.hidden_size": "n_embd d_model dim embed_dim emb_dim embedding_size hidden_dim model_dim width",
    "model.num_hidden_layers": "n_layer n_layers num_layers layers depth",
    "model.num_attention_heads": "n_head n_heads num_heads heads",
    "model.num_key_value_heads": "n_kv_heads n_kv_head num_kv_heads n_query_groups num_query_groups kv_heads",
    "model.head_dim": "head_size d_head kv_channels",
    "model.intermediate_size": "n_inner ffn_dim d_ff ffn_hidden_size mlp_dim mlp_hidden_size ffn_size",
    "model.vocab_size": "padded_vocab_size n_vocab",
    "model.max_position_embeddings": "n_positions n_ctx",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon",
    "model.mlp": "hidden_act activation activation_function mlp_type",
    "model.norm": "norm_type normalization layer_norm_type",
    "model.rope_theta": "rope_base rotary_base",
    "model.tie_word_embeddings": "tie_embeddings tied_embeddings weight_tying tie_weights",
    "model.dropout": "attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop",
    "model.initializer_range": "init_std init_method_std",
    "parameterization.base_hidden_size": "mup_base_width base_width d_model_base",
    "data.train": "path dataset datasets data_path train_path train_data train_files data_prefix",
    "data.sequence_length": "block_size seq_len seq_length context_length context_size max_seq_len max_seq_length "
    "max_sequence_length max_length ctx_len",
    "data.global_batch_size": "batch_size train_batch_size total_batch_size effective_batch_size",
    "data.micro_batch_size": "micro_batch micro_bs mbs device_batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu local_batch_size",
    "data.reader_threads": "num_workers dataloader_num_workers",
    "optimizer.lr": "learning_rate max_lr base_lr peak_lr lrate",
    "optimizer.weight_decay": "wd decay_rate",
    "optimizer.betas": "beta1 beta2 beta_1 beta_2 adam_beta1 adam_beta2 b1 b2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.grad_clip": "max_grad_norm clip_grad gradient_clip gradient_clip_val gradient_clipping clip_grad_norm "
    "max_norm",
    "optimizer.name": "optim optimizer_type",
    "schedule.name": "lr_scheduler_type lr_schedule scheduler lr_decay_style type",
    "schedule.warmup": "warmup_iters num_warmup_steps warmup_ratio lr_warmup_steps lr_warmup_iters lr_warmup_fraction "
    "warmup_steps warmup_tokens warmup_fraction",
    "schedule.decay": "cooldown_steps cooldown_fraction lr_decay_iters decay_iters decay_steps decay_tokens "
    "decay_fraction",
    "schedule.final_lr_fraction": "min_lr min_lr_ratio lr_min final_lr eta_min",
    "train.steps": "max_steps max_iters num_steps train_iters iterations num_iterations total_steps n_steps "
    "training_steps",
    "train.tokens": "max_tokens total_tokens num_tokens n_tokens token_budget",
    "train.log_interval": "log_every logging_steps log_freq",
    "train.eval_interval": "eval_steps eval_every eval_freq val_check_interval",
    "train.eval_batches": "eval_iters limit_val_batches",
    "train.activation_checkpointing": "gradient_checkpointing recompute activation_recompute checkpoint_activations",
    "train.initialize_from": "init_from pretrained pretrained_model model_name_or_path resume_from_pretrained",
    "deepspeed.precision": "dtype bf16 fp16 precision mixed_precision torch_dtype amp",
    "deepspeed.zero_stage": "stage zero zero_optimization zero_optimization_stage",
    "checkpoint.interval": "save_interval save_steps save_every save_freq checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit keep keep_last_n max_checkpoints",
}
"""Key of ours -> names elsewhere, in lower case with underscores."""

OF_OBJECTIVES = {"tau": "horizon", "heads": "horizon", "lambda": "weight"}
"""Name of a key in the papers on objectives -> ours in their section; in others it means another thing."""

WITHOUT_KEY: dict[str, str] = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accumulate_grad_batches"),
        "it follows from data.global_batch_size, data.micro_batch_size and the number of ranks",
    ),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs"),
        "say train.steps or train.tokens; data.train.0.max_epochs is a limit",
    ),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_from_checkpoint"), "the same command goes on from the newest whole checkpoint"
    ),
    **dict.fromkeys(("tokenizer", "tokenizer_path"), "a corpus holds its own, from prepare.py --tokenizer"),
    **dict.fromkeys(("device", "accelerator"), "GPUs are taken where there are any; CUDA_VISIBLE_DEVICES hides them"),
}
"""Name elsewhere -> what to do here, if there is no such key."""

_OURS = {name: key for key, names in SYNONYMS.items() for name in names.split()}


def meant_by(name: str, alone: bool = False) -> str | None:
    """Return a hint about what is called `name` elsewhere, or None if it is not known.

    Args:
        name: a key.
        alone: whether it was written without a section, so that it may also be one of ours.
    """
    name = name.lower().replace("-", "_")
    if name in WITHOUT_KEY:
        return WITHOUT_KEY[name]
    ours = next((key for key in SYNONYMS if alone and key.endswith(f".{name}")), _OURS.get(name))
    return None if ours is None else f"did you mean {ours}?"
