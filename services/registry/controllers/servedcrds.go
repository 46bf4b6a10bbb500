package controllers

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/types"

	"watershed.dev/services/registry/storage"
)

const (
	// servedTimeout bounds the delay between accepted names and Established. kube-apiserver always waits this long if
	// --apiserver-count is above 1.
	servedTimeout = 5 * time.Second
	// servedPeriod is the pause between the first reads of the gateways' reports, while a CRD waits. The pauses become
	// longer, up to maxServedPeriod.
	servedPeriod    = 10 * time.Millisecond
	maxServedPeriod = 250 * time.Millisecond
)

// servedCRDs holds the CRDs with accepted names until every live gateway serves them. A client that sees Established at
// a gateway then receives no 404 from another.
type servedCRDs struct {
	// byAll returns the CRDs that every live gateway serves, by name, with the lowest revision.
	byAll func(context.Context) (map[string]int64, error)
	// establish establishes a CRD.
	establish func(name string)
	wake      chan struct{}

	mu      sync.Mutex
	waiting map[string]waitingCRD
}

type waitingCRD struct {
	uid      types.UID
	revision int64
	deadline time.Time
}

func newServedCRDs(byAll func(context.Context) (map[string]int64, error), establish func(string)) *servedCRDs {
	return &servedCRDs{
		byAll:     byAll,
		establish: establish,
		wake:      make(chan struct{}, 1),
		waiting:   map[string]waitingCRD{},
	}
}

// changed is the informer's handler of CRDs.
func (s *servedCRDs) changed(obj any) {
	d, ok := obj.(*apiextensionsv1.CustomResourceDefinition)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	revision, err := storage.Revision(d)
	if err != nil || !apihelpers.IsCRDConditionTrue(d, apiextensionsv1.NamesAccepted) ||
		apihelpers.IsCRDConditionTrue(d, apiextensionsv1.Established) {
		delete(s.waiting, d.Name)
		return
	}
	if !slices.ContainsFunc(d.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool {
		return v.Served
	}) {
		s.establish(d.Name) // no gateway will serve it
		return
	}
	w := s.waiting[d.Name]
	if w.uid != d.UID {
		w = waitingCRD{uid: d.UID, deadline: time.Now().Add(servedTimeout)}
	}
	w.revision = int64(revision)
	s.waiting[d.Name] = w
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run establishes CRDs until ctx ends. It reads the reports only while a CRD waits.
func (s *servedCRDs) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		for pause := servedPeriod; s.check(ctx); pause = min(pause+pause/8, maxServedPeriod) {
			select {
			case <-ctx.Done():
				return
			case <-s.wake:
				pause = servedPeriod
			case <-time.After(pause):
			}
		}
	}
}

// check establishes the CRDs that every gateway serves, or that have waited for servedTimeout. It reports whether CRDs
// still wait.
func (s *servedCRDs) check(ctx context.Context) bool {
	readCtx, cancel := context.WithTimeout(ctx, servedTimeout)
	defer cancel()
	served, err := s.byAll(readCtx)
	if err != nil && ctx.Err() == nil {
		slog.Debug("Cannot read the gateways' reports of CRDs", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, w := range s.waiting {
		revision, ok := served[name]
		if ok && revision >= w.revision || time.Now().After(w.deadline) {
			delete(s.waiting, name)
			s.establish(name)
		}
	}
	return len(s.waiting) > 0
}
