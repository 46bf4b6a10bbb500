package eventlog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Stream creates the stream of the log, or updates an existing stream to the configuration.
func (o *Options) Stream(ctx context.Context, js jetstream.JetStream) (jetstream.Stream, error) {
	storage := jetstream.FileStorage
	switch o.Storage {
	case "memory":
		storage = jetstream.MemoryStorage
	case "file", "":
	default:
		return nil, fmt.Errorf(`--log-storage %q: want "file" or "memory"`, o.Storage)
	}
	if err := checkServer(js.Conn()); err != nil {
		return nil, err
	}
	if err := o.CheckOwner(ctx, js); err != nil {
		return nil, err
	}
	var metadata map[string]string
	if o.Owner != "" {
		metadata = map[string]string{ownerKey: o.Owner}
	}
	config := jetstream.StreamConfig{
		Name:         o.ID.Stream(),
		Subjects:     []string{o.ID.Subject(eventPrefix) + ">", o.ID.Subject(progressSubject)},
		Storage:      storage,
		Replicas:     max(o.Replicas, 1),
		MaxAge:       o.Retention,
		MaxBytes:     o.MaxBytes,
		Discard:      jetstream.DiscardOld,
		Duplicates:   min(o.Retention, time.Second),
		RePublish:    &jetstream.RePublish{Source: ">", Destination: o.ID.Subject(storedPrefix) + ">"},
		AllowDirect:  true, // lagging replicas answer direct gets too: see DirectGetReader
		Metadata:     metadata,
		MaxConsumers: 1, // no reader has a consumer, and 0 means no limit
	}
	stream, err := attempt(ctx, func(ctx context.Context) (jetstream.Stream, error) {
		return js.CreateOrUpdateStream(ctx, config)
	})
	apiErr := (*jetstream.APIError)(nil)
	if errors.As(err, &apiErr) && apiErr.ErrorCode == invalidConfig {
		if existing, err := o.ID.stream(ctx, js); err == nil && existing.CachedInfo().Config.Storage != storage {
			return nil, ErrOtherStorage
		}
	}
	if errors.As(err, &apiErr) && cannotReserve(apiErr) {
		return nil, fmt.Errorf("NATS cannot reserve --log-max-bytes=%d for --log-storage=%s: lower the value, or raise "+
			"the limit of the NATS servers: %w", o.MaxBytes, cmp.Or(o.Storage, "file"), err)
	}
	if err != nil {
		return nil, err
	}
	return stream, deleteConsumers(ctx, stream)
}

// ErrOtherStorage means that the stream has another storage than Options. JetStream refuses to change it, so the stream
// must be deleted.
var ErrOtherStorage = errors.New("the stream of the event log has another storage than --log-storage")

// Error codes of nats-server that package jetstream does not have.
const (
	invalidConfig            jetstream.ErrorCode = 10052
	clusterNoPeers           jetstream.ErrorCode = 10005
	memoryResourcesExceeded  jetstream.ErrorCode = 10028
	storageResourcesExceeded jetstream.ErrorCode = 10047
)

// cannotReserve reports whether the servers lack memory or storage for a stream's MaxBytes. A cluster reports this
// only in the text.
func cannotReserve(err *jetstream.APIError) bool {
	return err.ErrorCode == memoryResourcesExceeded || err.ErrorCode == storageResourcesExceeded ||
		err.ErrorCode == clusterNoPeers && strings.Contains(err.Description, "insufficient storage")
}

// ErrUnanswered means that the stream did not respond to the first requests of End, for 9 s. An election of Watershed's
// NATS servers takes 2 s at most. NATS' defaults are 4 to 9 s.
var ErrUnanswered = errors.New("the stream of the event log does not respond")

// Abandon deletes the stream if it does not respond and the NATS servers do. It returns false if it has not deleted the
// stream. The servers must respond before the deletion is sent: frozen servers would delete a healthy stream later.
func (o *Options) Abandon(ctx context.Context, js jetstream.JetStream) (bool, error) {
	within, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	return o.deleteIf(within, js, func(ctx context.Context) bool {
		again, stop := context.WithTimeout(ctx, deleteTimeout/4)
		defer stop()
		_, err := o.Stream(again, js)
		return isTimeout(err)
	})
}

// DeleteAt deletes the stream if the NATS servers respond, and the stream's creation and last sequence are these. It
// returns false if it has not deleted the stream.
func (o *Options) DeleteAt(ctx context.Context, js jetstream.JetStream, created time.Time,
	sequence uint64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	return o.deleteIf(ctx, js, func(ctx context.Context) bool {
		stream, err := o.ID.stream(ctx, js)
		if err != nil {
			return false
		}
		info := stream.CachedInfo()
		return info.Created.Equal(created) && info.State.LastSeq == sequence
	})
}

// Delete deletes the stream if the NATS servers respond. It returns false if it has not deleted the stream. The error
// is ErrNotDeleted if the stream responds after each of two deletions without a response: the servers do not allow it.
// A single response may be lost with a server, before the deletion or after it.
func (o *Options) Delete(ctx context.Context, js jetstream.JetStream) (bool, error) {
	for range 2 {
		within, cancel := context.WithTimeout(ctx, deleteTimeout/2)
		deleted, err := o.deleteIf(within, js, func(context.Context) bool { return true })
		cancel()
		if !isTimeout(err) {
			return deleted, err
		}
		within, cancel = context.WithTimeout(ctx, deleteTimeout/2)
		_, err = o.ID.stream(within, js)
		cancel()
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound):
			return true, nil
		case err != nil:
			return false, err
		}
	}
	return false, ErrNotDeleted
}

// ErrNotDeleted means that the NATS servers do not allow registry to delete the stream.
var ErrNotDeleted = errors.New("the NATS servers respond, and do not delete the stream")

// deleteIf deletes the stream if a leader of the servers responds, and the condition is true.
func (o *Options) deleteIf(ctx context.Context, js jetstream.JetStream,
	condition func(context.Context) bool) (bool, error) {
	if _, err := js.Stream(ctx, o.ID.Stream()+"-absent"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	if !condition(ctx) {
		return false, nil
	}
	err := js.DeleteStream(ctx, o.ID.Stream())
	if err == nil || errors.Is(err, jetstream.ErrStreamNotFound) {
		return true, nil
	}
	return false, err
}

// deleteTimeout bounds Abandon. Half of it bounds each deletion of Delete, and each request after it.
const deleteTimeout = 4 * time.Second

// ownerKey is the key of the owner in the stream's metadata.
const ownerKey = "watershed.dev/owner"

// ErrOtherOwner means that the stream belongs to another control plane, or to another log of the same control plane.
var ErrOtherOwner = errors.New("the NATS servers hold another event log")

// CheckOwner returns ErrOtherOwner if the stream has another owner.
func (o *Options) CheckOwner(ctx context.Context, js jetstream.JetStream) error {
	if o.Owner == "" {
		return nil
	}
	stream, err := o.ID.stream(ctx, js)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if owner := stream.CachedInfo().Config.Metadata[ownerKey]; owner != "" && owner != o.Owner {
		return fmt.Errorf("%w (%s), not %s: use other NATS servers, or the same --etcd-prefix and --log-name", ErrOtherOwner,
			owner, o.Owner)
	}
	return nil
}

// deleteConsumers deletes the consumers of the stream. An older release or a stolen key may have created them.
func deleteConsumers(ctx context.Context, stream jetstream.Stream) error {
	if stream.CachedInfo().State.Consumers == 0 {
		return nil
	}
	names := stream.ConsumerNames(ctx)
	deleted := 0
	for name := range names.Name() {
		if err := stream.DeleteConsumer(ctx, name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return fmt.Errorf("consumer %q of the event log: %w", name, err)
		}
		deleted++
	}
	slog.Info("Deleted the consumers of the event log's stream", "consumers", deleted)
	return names.Err()
}

// lastEventLookback is how many messages End reads back from the end of the log for its last event.
const lastEventLookback = 32

// End reads the end of the log. It creates a missing stream, and may return ErrUnanswered or ErrOtherStorage. keyOf
// returns the etcd key of an event's object, or an empty string if it is unknown.
func (o *Options) End(ctx context.Context, js jetstream.JetStream, keyOf func(*logv1.Event) string) (
	end core.LogEnd, err error) {
	if _, err = o.Stream(ctx, js); isTimeout(err) {
		return end, fmt.Errorf("%w: %w", ErrUnanswered, err)
	} else if err != nil {
		return end, err
	}
	last, sequence, ok, err := o.ID.Last(ctx, js)
	if err != nil {
		return end, err
	}
	end = core.LogEnd{Empty: !ok, Last: last, Sequence: sequence}
	if end.Empty {
		return end, nil
	}
	m, err := o.ID.GetLast(ctx, js, o.ID.Subject(progressSubject))
	switch {
	case err == nil:
		end.Progress = &logv1.Event{} // of no epoch, if the message is corrupt
		if progress, err := o.ID.events(storedMessage(m.Header, m.Sequence, m.Data)); err == nil {
			end.Progress = progress[0]
		}
	case !errors.Is(err, jetstream.ErrMsgNotFound):
		return end, err
	}
	for seq, more := sequence, true; more && seq > 0 && seq+lastEventLookback > sequence; seq-- {
		m, err := o.ID.Get(ctx, js, seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			return end, err
		}
		events, _ := o.ID.events(storedMessage(m.Header, m.Sequence, m.Data))
		for i := len(events) - 1; i >= 0 && more; i-- {
			more = end.ReadBack(events[i], keyOf(events[i]))
		}
	}
	return end, nil
}
