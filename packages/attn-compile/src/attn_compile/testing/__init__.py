"""What a package needs to prove its operators and backends exact under torch.compile."""
