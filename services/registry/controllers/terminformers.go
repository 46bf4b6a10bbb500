package controllers

import (
	"context"
	"time"

	"k8s.io/client-go/tools/cache"
)

// termInformer is an informer of the process for the controllers of a term. Upstream's controllers run once in a
// process and leave their handlers. termInformer removes them when the term ends; otherwise each further term would
// leave goroutines, which receive every event.
type termInformer[L any] struct {
	informer cache.SharedIndexInformer
	lister   L
}

// forTerm returns an informer whose handlers end with ctx.
func forTerm[L any](ctx context.Context, i interface {
	Informer() cache.SharedIndexInformer
	Lister() L
}) termInformer[L] {
	return termInformer[L]{handlersOf{i.Informer(), ctx}, i.Lister()}
}

func (i termInformer[L]) Informer() cache.SharedIndexInformer { return i.informer }
func (i termInformer[L]) Lister() L                           { return i.lister }

// handlersOf is an informer. When the term ends, it removes the handlers that were added through it.
type handlersOf struct {
	cache.SharedIndexInformer
	term context.Context
}

// AddEventHandler implements cache.SharedInformer.
func (i handlersOf) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.removed(i.SharedIndexInformer.AddEventHandler(h))
}

// AddEventHandlerWithResyncPeriod implements cache.SharedInformer.
func (i handlersOf) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler,
	period time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return i.removed(i.SharedIndexInformer.AddEventHandlerWithResyncPeriod(h, period))
}

// AddEventHandlerWithOptions implements cache.SharedInformer.
func (i handlersOf) AddEventHandlerWithOptions(h cache.ResourceEventHandler,
	o cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	return i.removed(i.SharedIndexInformer.AddEventHandlerWithOptions(h, o))
}

func (i handlersOf) removed(r cache.ResourceEventHandlerRegistration,
	err error) (cache.ResourceEventHandlerRegistration, error) {
	if err == nil {
		context.AfterFunc(i.term, func() { _ = i.RemoveEventHandler(r) })
	}
	return r, err
}
