from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="out", fp16=True, fsdp="full_shard auto_wrap", max_grad_norm=0)
Trainer(model=make_model(), args=arguments, train_dataset=dataset).train()
