package core

import "time"

const (
	// BurstSeconds is the burst of a user, in seconds of its rate.
	BurstSeconds = 10
	// bytesPerToken is how many bytes of event data cost a token.
	bytesPerToken = 1 << 10
)

// EventCost returns the tokens that events with some bytes of data cost.
func EventCost(events, bytes int) float64 { return float64(events + bytes/bytesPerToken) }

// Bucket is a user's token bucket. Over its rate, events arrive later and in batches; none is dropped.
type Bucket struct {
	rate       float64 // tokens per second
	tokens     float64 // negative: a debt
	refilledAt time.Time
}

// NewBucket returns a full bucket.
func NewBucket(rate int, now time.Time) Bucket {
	return Bucket{float64(rate), BurstSeconds * float64(rate), now}
}

// Refill adds the tokens since the last call.
func (b *Bucket) Refill(now time.Time) {
	if elapsed := now.Sub(b.refilledAt).Seconds(); elapsed > 0 {
		b.tokens = min(b.tokens+elapsed*b.rate, BurstSeconds*b.rate)
		b.refilledAt = now
	}
}

// Empty returns true if no token is left.
func (b *Bucket) Empty() bool { return b.tokens <= 0 }

// Charge takes cost tokens. A cost above the balance becomes a debt. A negative cost returns tokens.
func (b *Bucket) Charge(cost float64) { b.tokens -= cost }

// UntilToken returns how long it takes until a token is left. It is negative if a token is left.
func (b *Bucket) UntilToken() time.Duration {
	return time.Duration(-b.tokens / b.rate * float64(time.Second))
}

// UntilFull returns how long it takes until the bucket is full.
func (b *Bucket) UntilFull() time.Duration {
	return time.Duration((BurstSeconds*b.rate - b.tokens) / b.rate * float64(time.Second))
}
