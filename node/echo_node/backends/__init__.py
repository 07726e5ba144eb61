"""What samples: engines that live in a child process, and the seam through which the node uses them."""
