// Server-sent events: bytes in any pieces to the data of each event.

export class EventParser {
  private rest = "";
  private readonly decoder = new TextDecoder();

  /** The data of the events that these bytes complete. Comments and other fields are passed over. */
  push(bytes: Uint8Array): string[] {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const found: string[] = [];
    for (;;) {
      const end = this.rest.indexOf("\n\n");
      if (end < 0) return found;
      const block = this.rest.slice(0, end);
      this.rest = this.rest.slice(end + 2);
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) found.push(lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n"));
    }
  }
}
