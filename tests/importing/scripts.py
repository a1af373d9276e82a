"""Launch scripts in the form of Megatron-LM's examples (gpt3, llama, mixtral), for the tests of
import-args."""

HEAD = """#!/bin/bash
# A comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-2}
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=${2:-"tokens/mine_text_document"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)
"""
TAIL = """
EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
)
echo "starting $WORLD_SIZE ranks"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    ${DATA_ARGS[@]} \\
    "${EVAL_AND_LOGGING_ARGS[@]}"
"""
GPT = (
    HEAD
    + """
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 4
\t--pipeline-model-parallel-size 2
)
DATA_ARGS=(
    --data-path $DATA_PATH
    --vocab-size 50257
    --split 949,50,1
)
"""
    + TAIL
)
LLAMA = (
    HEAD
    + """
MODEL_ARGS="--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
    --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
    --init-method-std 0.0134 --untie-embeddings-and-output-weights --disable-bias-linear"
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 0.00015
    --min-lr 0.00001
    --lr-decay-style cosine
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --exit-duration-in-mins 235
)
TRAINING_ARGS+=(
    "--fp8-format hybrid"
    "--fp8-amax-history-len 1024"
    "--fp8-amax-compute-algo max"
    "--fp8-param-gather"
)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
DATA_ARGS=(
    --data-path 0.7 tokens/a 0.3 tokens/b
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model tokenizers/llama
    "--split '99,1,0'"
    --num-workers 1
)
"""
    + TAIL
)
MIXTRAL = (
    HEAD
    + """
MODEL_ARGS=(
    --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-position-embedding --rotary-base 1000000
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr=1.0e-5 --weight-decay 0.1
    --lr-warmup-iters 500 --clip-grad 1.0 --bf16
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method block --recompute-num-layers 2
)
DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path $DATA_PATH --split 99990,8,2
)
"""
    + TAIL
)
# as in Megatron-LM's examples: a part of the arguments that the environment decides
CONDITION = """if [ -n "${WANDB_API_KEY}" ]; then
    EVAL_AND_LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"mine"}
    )
fi
"""
SCRIPTS = {"gpt": GPT, "llama": LLAMA, "mixtral": MIXTRAL}
ASSUMED = {
    "CHECKPOINT_PATH": "runs/mine",
    "DATA_PATH": "tokens/mine_text_document",
    "DISTRIBUTED_ARGS": "--nproc_per_node 8 --nnodes 2",
}
