"""The run file that `lobra init` writes."""

RUN_FILE_TEMPLATE = """\
# A joint fine-tuning run. Check it with `lobra validate`, see its plan with `lobra plan`, start it with `lobra run`.
# Relative paths start at the working folder. Every key: `lobra schema`.
name: my-run

base_model:
  path: models/my-base-model   # a local Hugging Face folder: config.json, *.safetensors, tokenizer
  dtype: bfloat16              # float32 | bfloat16; adapters are always float32

tenants:
  - name: support-chat
    dataset:
      path: data/support.jsonl       # format: jsonl | json | json_by_id | csv | parquet; also .gz
      messages_column: messages      # chat turns [{role, content}]; loss on assistant turns
      # max_length: 4096             # longer rows are dropped and counted (overlong: drop | truncate | error)
      # max_drop_ratio: 0.05         # more over-long rows than this are an error
      # max_reject_ratio: 0.0        # more broken rows than this are an error
      # evaluation_ratio: 0.05       # rows held out for evaluation, as part of all rows
    adapter:
      rank: 16
      alpha: 32
      target_modules: [q_proj, k_proj, v_proj, o_proj]   # also gate_proj, up_proj, down_proj
      # initial_adapter: adapters/support-2025   # a PEFT folder to continue from; same rank, alpha and targets
    optimiser:
      learning_rate: 2.0e-4
      schedule: cosine               # constant | linear | cosine; both fall to zero at the last step
      warmup_steps: 10               # steps over which the rate rises from zero; fewer than all
    batch_size: 64                   # sequences per step
    epochs: 1                        # or steps: 500
    seed: 0
    # evaluation:                    # loss and perplexity on the rows held out; needs dataset.evaluation_ratio
    #   every: 50                    # steps between evaluations; the last step is evaluated too
    #   patience: 3                  # stop early after so many without improvement; left out: never
    #   min_delta: 0.01              # smallest decrease of the loss that is an improvement
    #   publish: best                # best | last: the adapter of the lowest evaluation loss, or of the last step
  - name: maths
    dataset:
      path: data/maths.jsonl
      prompt_column: question
      response_column: answer        # loss on the response and the final end-of-sequence token
    adapter: {rank: 8, alpha: 16}
    batch_size: 128
    steps: 500

cluster:
  num_gpus: 8
  gpus_per_node: 8
  memory_per_gpu_gib: 80
  backend: auto                      # auto | gloo | nccl

planner:
  strategy: lobra
  num_buckets: 16

profile:
  source: file                       # file | preset | measure (see `lobra profile`)
  path: profiles/my-hardware.json

training:
  save_every: 20                     # steps between checkpoints
  on_tenant_error: fail              # fail | skip: whether a bad tenant ends the run
  activation_recompute: none         # none | full: longer chunks fit, a step takes about half as long again
  sequence_parallel: false           # true: longer chunks fit where tp > 1

data:
  cache_dir: runs/.cache
  num_workers: 0                     # Dask processes that tokenise; 0: this process

tracking:
  mlflow_uri: sqlite:///mlflow.db
  experiment: lobra
"""
