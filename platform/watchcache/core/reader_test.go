package core

import (
	"errors"
	"slices"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// A replay of a resource reads some of the stream's messages. It notices that others have replaced its last message
// and the messages after it, although the stream is as long as before.
func TestAReplayNoticesAnotherEnd(t *testing.T) {
	message := func(sequence uint64, id string) *logv1.StoredMessage {
		return &logv1.StoredMessage{Sequence: sequence, Id: id}
	}
	read := func() *Replay {
		r := NewReplay(10, "e")
		if got := r.Request("pods"); got.After != 10 || got.Sequence != 0 {
			t.Fatalf("the first request: %v", got)
		}
		c := &logv1.Chunk{Created: 1, Last: 500, Through: 500, Messages: []*logv1.StoredMessage{message(490, "a")}}
		if got, err := r.Chunk(c); err != nil || len(got) != 1 {
			t.Fatalf("the first chunk: %v, %v", got, err)
		}
		if got := r.Request("pods"); got.Sequence != 490 || got.After != 0 {
			t.Fatalf("the second request: %v", got)
		}
		return r
	}
	for about, c := range map[string]struct {
		chunk *logv1.Chunk
		want  []string
		err   error
	}{
		"no further message": {chunk: &logv1.Chunk{Created: 1, Last: 500,
			Messages: []*logv1.StoredMessage{message(490, "a")}}},
		"further messages": {
			chunk: &logv1.Chunk{Created: 1, Last: 502,
				Messages: []*logv1.StoredMessage{message(490, "a"), message(495, "b"), message(501, "c")}},
			want: []string{"b", "c"},
		},
		"another last message": {
			chunk: &logv1.Chunk{Created: 1, Last: 501,
				Messages: []*logv1.StoredMessage{message(490, "x"), message(501, "y")}},
			err: ErrMissed,
		},
		"the last message has another sequence": {
			chunk: &logv1.Chunk{Created: 1, Last: 501, Messages: []*logv1.StoredMessage{message(501, "a")}},
			err:   ErrMissed,
		},
		"a shorter stream": {chunk: &logv1.Chunk{Created: 1, Last: 480}, err: ErrMissed},
		"another stream": {
			chunk: &logv1.Chunk{Created: 2, Last: 501, Messages: []*logv1.StoredMessage{message(490, "a")}},
			err:   ErrMissed,
		},
	} {
		messages, err := read().Chunk(c.chunk)
		var got []string
		for _, m := range messages {
			got = append(got, m.Id)
		}
		if !errors.Is(err, c.err) || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v, want %v, %v", about, got, err, c.want, c.err)
		}
	}
}
