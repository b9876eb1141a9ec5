// Browsers start no worker from a file, and the search runs in one: opened from a folder, the page runs it in a frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      (document.body || document.documentElement).append(this.frame);
      const inside = this.frame.contentWindow, page = this.frame.contentDocument;
      const load = source => new Promise((done, failed) => {
        const script = page.createElement("script");
        Object.assign(script, { src: source, onload: done, onerror: failed });
        page.head.append(script);
      });
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...sources) => Promise.all(sources.map(load));
      load(url).then(() => {
        for (const data of this.waiting.splice(0)) this.send(data);
        this.waiting = null;
      });
    }
    send(data) {
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
    postMessage(data) {
      this.waiting ? this.waiting.push(data) : this.send(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
