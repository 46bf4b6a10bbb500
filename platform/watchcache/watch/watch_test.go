package watch

import (
	"context"
	"slices"
	"testing"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/query"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A watch sends a backfill in pieces. Each event is sent once, and each piece is bounded, whatever the size of the
// backfill and of its transactions.
func TestABackfillIsSentInPieces(t *testing.T) {
	var all []*cache.Event
	for revision := int64(10); revision < 30; revision++ {
		for index := range int32(3) {
			all = append(all, &cache.Event{
				Revision: revision,
				Index:    index,
				Item:     cache.ItemOf(&registryv1.Row{Json: make([]byte, int(revision%5)*100<<10)}),
			})
		}
	}
	w := &watcher{}
	w.setPosition(10, 1)
	var seen []*cache.Event
	for complete := false; !complete; {
		var events []*cache.Event
		var size int
		events, size, complete = w.piece(all, backfillPiece)
		bytes := 0
		for _, e := range events {
			bytes += e.Size()
		}
		if size != bytes {
			t.Errorf("piece reports %d bytes, its events have %d", size, bytes)
		}
		if len(events) == 0 || len(events) > 1 && bytes > backfillPiece || cap(events) > 2*len(events)+8 {
			t.Fatalf("%d events of %d bytes, of a backfill of %d", len(events), bytes, len(all))
		}
		seen = append(seen, events...)
		w.advanceTo(events[len(events)-1])
	}
	if !slices.Equal(seen, all[2:]) {
		t.Errorf("%d events were taken, of %d", len(seen), len(all)-2)
	}
}

// A webhook may convert a field that a selector names. A watch of metadata selects by the converted field too.
func TestMetadataIsSelectedByConvertedFields(t *testing.T) {
	widget := &commonv1.Kind{Group: "example.com", Version: "v2", Kind: "Widget"}
	entry := &registryv1.APIResource{
		Resource:        &commonv1.Resource{Group: "example.com", Version: "v2", Resource: "widgets"},
		Kind:            widget,
		StoredKind:      &commonv1.Kind{Group: "example.com", Version: "v1", Kind: "Widget"},
		StorageResource: "widgets.example.com",
		Unstructured:    true,
		ConvertedFields: true,
	}
	red := &registryv1.EncodeResponse{Fields: []*registryv1.Fields{{Fields: map[string]string{"spec.color": "red"}}}}
	encode := func(context.Context, *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) { return red, nil }
	blue := cache.ItemOf(&registryv1.Row{Name: "a", Version: "v1", Fields: map[string]string{"spec.color": "blue"}})
	for selector, want := range map[string]bool{"spec.color=red": true, "spec.color=blue": false} {
		q, err := query.New(entry, &watchfanoutv1.Query{FieldSelector: selector, Output: &registryv1.Output{
			MediaType: frame.JSON,
			As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadata"},
		}})
		if err != nil {
			t.Fatal(err)
		}
		w := &watcher{query: q, converter: conversion.New(encode, cache.New(1<<20, 0), 0)}
		if got, err := w.matches(t.Context(), &cache.Event{Item: blue}, "fields", blue); got != want || err != nil {
			t.Errorf("%s: %v, %v", selector, got, err)
		}
	}
}
