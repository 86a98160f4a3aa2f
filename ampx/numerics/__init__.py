"""The precision debugger: is mixed precision worth it, where does it break, and which layers stay in float32."""
