package eventlog

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

func secretEvent(text string) *logv1.Event {
	return &logv1.Event{
		Type: logv1.Type_TYPE_MODIFIED, Revision: 7, Index: 1, More: true,
		StorageResource: "secrets", Namespace: "x", Name: "n",
		Object:   &logv1.Object{Json: []byte(text), Labels: map[string]string{"l": text}},
		Previous: &logv1.Object{Json: []byte(text + text)},
	}
}

// Encrypted contents are unreadable, decrypt completely, and decrypt only in their own event.
func TestEncryptedEventsAreBound(t *testing.T) {
	secret := bytes.Repeat([]byte{7}, KeyBytes)
	for _, text := range []string{"PLAINTEXT", strings.Repeat("PLAINTEXT", 20000)} {
		want, e := secretEvent(text), secretEvent(text)
		if err := Encrypt(e, "k", secret); err != nil {
			t.Fatal(err)
		}
		m, err := Message(e)
		if err != nil || bytes.Contains(m.Data, []byte("PLAINTEXT")) || len(m.Data) > len(text)/2+1000 {
			t.Errorf("%v: %d bytes, or they can be read", err, len(m.Data))
		}
		for name, change := range map[string]func(*logv1.Event){
			"name":     func(e *logv1.Event) { e.Name = "other" },
			"revision": func(e *logv1.Event) { e.Revision++ },
			"type":     func(e *logv1.Event) { e.Type = logv1.Type_TYPE_ADDED },
			"data":     func(e *logv1.Event) { e.Encrypted.Data[20] ^= 1 },
			"all":      func(e *logv1.Event) { e.Encrypted.Data = nil },
		} {
			moved := proto.Clone(e).(*logv1.Event)
			change(moved)
			if decrypt(moved, secret) == nil {
				t.Errorf("it is opened with another %s", name)
			}
		}
		if err := decrypt(e, secret); err != nil || !proto.Equal(e, want) {
			t.Errorf("%v, %v", e, err)
		}
	}
}

// An event with an unavailable key becomes a reset of its resource, in order. An event with a late key waits.
func TestUndecryptableEventsResetTheirResource(t *testing.T) {
	secret := bytes.Repeat([]byte{7}, KeyBytes)
	late := 2
	keys := func(_ context.Context, _, key string) ([]byte, error) {
		switch {
		case key == "gone":
			return nil, ErrNoKey
		case key == "late" && late > 0:
			late--
			return nil, errors.New("no registry responds")
		}
		return secret, nil
	}
	var got []*logv1.Event
	handle := WithDecryption(t.Context(), keys, func(e *logv1.Event) error { got = append(got, e); return nil })
	for _, key := range []string{"k", "late", "gone"} {
		e := secretEvent("text")
		if err := Encrypt(e, key, secret); err != nil {
			t.Fatal(err)
		}
		if err := handle(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := handle(&logv1.Event{Revision: 9}); err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 || !proto.Equal(got[0], secretEvent("text")) || !proto.Equal(got[1], got[0]) ||
		got[3].Revision != 9 {
		t.Errorf("%v", got)
	}
	if r := got[2]; r.Type != logv1.Type_TYPE_RESET || r.StorageResource != "secrets" || r.Revision != 7 ||
		r.Index != 1 ||
		!r.More {
		t.Errorf("%v", r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	e := secretEvent("text")
	_ = Encrypt(e, "k", secret)
	handle = WithDecryption(
		ctx,
		func(context.Context, string, string) ([]byte, error) { return nil, errors.New("away") },
		nil,
	)
	if err := handle(e); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A key is fetched once. An unavailable key is fetched again after NegativeTTL, and after another error at once.
func TestDataKeysAreCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cache KeyCache
		calls := 0
		get := func(name string, answer error) ([]byte, error) {
			return cache.Get(name, func() ([]byte, error) { calls++; return []byte(name), answer })
		}
		for _, step := range []struct {
			name   string
			answer error
			later  time.Duration
			asked  int
		}{
			{"a", nil, 0, 1}, {"a", ErrNoKey, 24 * time.Hour, 1},
			{"b", errors.New("away"), 0, 2}, {"b", ErrNoKey, 0, 3}, {"b", nil, NegativeTTL / 2, 3},
			{"b", nil, NegativeTTL, 4},
		} {
			time.Sleep(step.later) // on the clock of the synctest bubble
			_, _ = get(step.name, step.answer)
			if calls != step.asked {
				t.Errorf("%s is fetched %d times, not %d", step.name, calls, step.asked)
			}
		}
		for i := range 2 * maxCachedKeys {
			_, _ = get(strconv.Itoa(i), nil)
		}
		if n := len(cache.cached); n > maxCachedKeys {
			t.Errorf("%d keys are kept", n)
		}
	})
}
