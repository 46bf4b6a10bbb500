package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// silence is the time without a line after which the terminal shows the reason, and repeatedSilence the interval
	// of further reasons.
	silence         = 3 * time.Second
	repeatedSilence = 15 * time.Second
	// stopSilence is the time after which the terminal shows which part has not stopped.
	stopSilence = time.Second
)

// progress prints a line for each part that starts, and why a part is slow to start or to stop.
type progress struct {
	w io.Writer

	mu sync.Mutex
	// part is the part that starts, since began. Empty: none.
	part  string
	began time.Time
	slow  *time.Timer
}

func (p *progress) say(format string, args ...any) { fmt.Fprintf(p.w, format+"\n", args...) }

// starting begins the line of a part. reason returns why it has not started; nil: the reason is unknown.
func (p *progress) starting(part string, reason func() error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.part, p.began = part, time.Now()
	fmt.Fprintf(p.w, "  %-14s ", part)
	p.slow = time.AfterFunc(silence, func() { p.explain(part, reason) })
}

// explain prints why a part has not started, if it is still the last.
func (p *progress) explain(part string, reason func() error) {
	err := reason()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.part != part {
		return
	}
	if err != nil {
		fmt.Fprintf(p.w, "not ready yet: %v\n  %-14s ", err, part)
	}
	p.slow.Reset(repeatedSilence)
}

// note prints a line, and then the begin of the line of the part that starts again.
func (p *progress) note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.part == "" {
		p.say("%s", text)
		return
	}
	fmt.Fprintf(p.w, "\n%s\n  %-14s ", text, p.part)
}

// started ends the line of the part that starts. Empty text: its duration.
func (p *progress) started(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.part == "" {
		return
	}
	if text == "" {
		text = fmt.Sprintf("%5d ms", time.Since(p.began).Milliseconds())
	}
	p.end(text)
}

// failed ends the line of the part that starts, before an error.
func (p *progress) failed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.part != "" {
		p.end("")
	}
}

// end ends the line. The lock is held.
func (p *progress) end(text string) {
	p.slow.Stop()
	fmt.Fprintln(p.w, text)
	p.part = ""
}

// stopping prints the part that stops, if it has not stopped after stopSilence. It may take at most timeout. The
// result ends this.
func (p *progress) stopping(part string, timeout time.Duration) (stopped func()) {
	t := time.AfterFunc(stopSilence, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.say("Waiting for %s to stop, for at most %v. Ctrl-C ends the process at once.", part, timeout)
	})
	return func() { t.Stop() }
}
