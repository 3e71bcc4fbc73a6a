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
    adapter:
      rank: 16
      alpha: 32
      target_modules: [q_proj, k_proj, v_proj, o_proj]   # also gate_proj, up_proj, down_proj
    optimiser:
      learning_rate: 2.0e-4
    batch_size: 64                   # sequences per step
    epochs: 1                        # or steps: 500
    seed: 0
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
