import os

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def training_function(model_id, epochs, lr):
    dataset = load_from_disk(os.environ["SM_CHANNEL_TRAIN"])
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.float32, use_cache=False)
    training_args = TrainingArguments(
        output_dir="/opt/ml/checkpoints",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=epochs,
        learning_rate=lr,
        bf16=True,
        max_grad_norm=0.3,
        fsdp="full_shard auto_wrap",
        fsdp_config={"backward_prefetch": "backward_pre", "use_orig_params": True},
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=dataset)
    trainer.train()
    trainer.save_model("/opt/ml/model")
