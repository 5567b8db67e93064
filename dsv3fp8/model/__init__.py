"""The DeepSeek-V3 model as plain single-device modules that read like its equations. Dtypes are the recipe's business."""
