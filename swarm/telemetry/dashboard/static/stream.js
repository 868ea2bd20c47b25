// Frames from the server: by a stream, and by asking where no stream is to be had.

const SILENCE_MS = 6000, ASK_MS = 5000, AGAIN_MS = 2000;

export class Stream {
  // onFrame(state), onLost(why): lost is told once a second as long as it lasts
  constructor({ onFrame, onLost }) {
    Object.assign(this, { onFrame, onLost, heard: performance.now(), source: null, why: "" });
    this.open();
    setInterval(() => this.watch(), 1000);
  }

  open() {
    this.source?.close();
    this.source = new EventSource("/api/stream");
    this.source.onmessage = (event) => this.take(event.data);
    this.source.onerror = () => {
      this.why = "the server does not answer";
      if (this.source.readyState === EventSource.CLOSED) this.again();
    };
  }

  again() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), AGAIN_MS);
  }

  // The server may be there and have no stream left.
  async ask() {
    try {
      const answer = await fetch("/api/state", { signal: AbortSignal.timeout(ASK_MS) });
      if (answer.ok) this.take(await answer.text());
      else this.why = "the server has nothing to show yet";
    } catch {
      this.why = "the server does not answer";
    }
    this.open();
  }

  take(text) {
    let state;
    try {
      state = JSON.parse(text);
    } catch {
      this.onLost("the server sent what this page cannot read", 0);
      return;
    }
    this.heard = performance.now();
    this.onFrame(state);
  }

  watch() {
    const silent = performance.now() - this.heard;
    if (silent < SILENCE_MS && this.source.readyState === EventSource.OPEN) return;
    if (silent >= SILENCE_MS && this.source.readyState === EventSource.OPEN) this.open();
    if (silent >= 1500) this.onLost(this.why || "nothing comes", silent / 1000);
  }
}
