"""Every message that has a type, as one union."""

from typing import Annotated

from pydantic import Field

from swarm.wire.messages import (
    AdvertBody,
    AdvertsReply,
    ChunkRequest,
    DataManifest,
    DialBack,
    DialBackReply,
    FindProviders,
    Greeting,
    GreetingReply,
    GroupBody,
    GroupsReply,
    Have,
    HaveReply,
    HeadBody,
    HeadsReply,
    Hello,
    HelloReply,
    LargeAdvertBody,
    LeaseReply,
    ManifestBody,
    PieceReply,
    ProvidersReply,
    RecentAdverts,
    RunReply,
    Submission,
    SubmissionReply,
    Want,
    WantData,
    WantDataManifest,
    WantHeads,
    WantLease,
    WantManifest,
    WantPiece,
    WantRun,
)
from swarm.wire.steering import (
    LearnerReport,
    PlanReply,
    SetPlan,
    WantReport,
)

Message = Annotated[
    GroupBody
    | AdvertBody
    | LargeAdvertBody
    | Hello
    | HelloReply
    | Greeting
    | GreetingReply
    | RecentAdverts
    | AdvertsReply
    | Want
    | GroupsReply
    | WantPiece
    | PieceReply
    | Have
    | HaveReply
    | DialBack
    | DialBackReply
    | FindProviders
    | ProvidersReply
    | HeadBody
    | WantHeads
    | HeadsReply
    | WantManifest
    | ManifestBody
    | ChunkRequest
    | WantLease
    | LeaseReply
    | Submission
    | SubmissionReply
    | WantReport
    | LearnerReport
    | SetPlan
    | PlanReply
    | WantRun
    | RunReply
    | WantDataManifest
    | DataManifest
    | WantData,
    Field(discriminator="type"),
]
